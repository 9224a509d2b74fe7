"""The web console: one page for all apps of a broker. Everything it knows comes from the apps' topics."""
