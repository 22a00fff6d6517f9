"""Diagnosis of steps that are not finite: the cause, and a copy of the batch to replay."""
