"""Prediction of datasets and corpora with trained models."""
