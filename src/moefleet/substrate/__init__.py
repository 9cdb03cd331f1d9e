"""Memory that peers share and how they signal."""
