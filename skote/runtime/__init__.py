"""The decode closure: cache, engine, sampling, replicas, the router, and text generation."""
