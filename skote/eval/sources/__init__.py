"""Where the requests of a workload come from: files of traces, prompts and conversations, read as a stream."""
