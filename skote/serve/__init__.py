"""The engine as a server that speaks the OpenAI HTTP API, over the router; its packages are the extra `serve`."""
