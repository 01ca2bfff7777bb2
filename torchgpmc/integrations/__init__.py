"""Bridges from where users work: scikit-learn here; others are imported by name, and only then."""
