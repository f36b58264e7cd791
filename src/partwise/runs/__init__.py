"""Trainings: run, record, resume, judge and use them. The public API is here."""
