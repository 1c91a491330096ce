"""The `moecache` command: one module per subcommand, found by listing this folder."""
