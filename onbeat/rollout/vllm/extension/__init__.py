"""What vLLM's own worker processes import, in vLLM's environment: this directory is on their path, onbeat is not."""
