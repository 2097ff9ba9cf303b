"""The runtime: worlds, transports, and the state that lives on a rank."""
