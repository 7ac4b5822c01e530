"""Runs with their folders, queues, workers and states."""
