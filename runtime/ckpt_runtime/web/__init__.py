"""Web pages: files as browsers load them, without a build step. What serves them is the business of others."""
