"""Look into stores, and into what their LSPs represent."""
