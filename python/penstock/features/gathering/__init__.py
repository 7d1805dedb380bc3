"""Gathers of rows under way: their ids, requests and results."""
