"""An HTTP server: requests in OpenAI's format, all of them in one engine."""
