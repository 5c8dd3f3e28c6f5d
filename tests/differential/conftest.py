"""The engine beside the system whose contract it claims, on the same input in one test."""
