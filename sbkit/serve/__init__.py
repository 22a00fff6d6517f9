"""A bundle behind an OpenAI-shaped API, a WebSocket and a page; imports no training code and no HyperPyYAML."""
