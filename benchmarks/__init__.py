"""Measurements of xfused beside what users have without it."""
