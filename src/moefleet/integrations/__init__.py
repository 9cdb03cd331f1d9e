"""Other people's engines, one module or folder each. Importing one imports its engine; nothing else here does."""
