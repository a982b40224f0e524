"""Programs and a machine -> seconds, and which algorithm or schedule wins."""
