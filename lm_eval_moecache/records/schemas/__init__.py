"""The form of every file that is read, checked by pydantic: what users write, and what
this package writes.

A schema says which fields there are and of what kind; what a value means (whether an algorithm has
that parameter, a device that bandwidth) is for the module that uses it. Imported where a file is
read, as pydantic takes a tenth of a second.
"""
