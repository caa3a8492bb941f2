"""Diagnosis: who a training that stands still waits for, from plain records of where every worker is."""
