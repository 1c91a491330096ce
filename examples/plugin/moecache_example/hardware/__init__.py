"""Hardware profiles, one YAML each."""
