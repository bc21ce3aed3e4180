"""Evaluation of many problems in one folder: samples, progress, results and their page."""
