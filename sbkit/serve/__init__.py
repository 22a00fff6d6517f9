"""Server for bundles: an OpenAI-style API, a WebSocket and a web page; imports no training code and no HyperPyYAML."""
