"""One folder per transport: a Fleet, a Handle, a probe."""
