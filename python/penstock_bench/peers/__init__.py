"""Penstock and the libraries it is compared with, behind one interface for each job."""
