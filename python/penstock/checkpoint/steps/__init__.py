"""The steps of a store: which one is loaded, which are kept, which are set aside."""
