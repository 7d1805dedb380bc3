"""Saves and loads beside fio and the libraries a user would pick instead."""
