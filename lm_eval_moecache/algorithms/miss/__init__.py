"""Miss algorithms: what happens to a needed expert that is absent. The folder is the registry."""
