"""The `hf-longctx` command: one file per subcommand."""
