"""The tests; a package, so that files of the same name may lie in different folders."""
