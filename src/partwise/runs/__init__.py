"""Trainings: run, record, resume, evaluate and use them. The public API is here."""
