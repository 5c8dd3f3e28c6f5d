"""What the demonstration is made of; never imported by the runtime or by the provider."""
