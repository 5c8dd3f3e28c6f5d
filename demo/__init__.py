"""The parts of the demonstration; never imported by the runtime or by the provider."""
