"""Drawing tokens: the distribution that is drawn from, and the noise."""
