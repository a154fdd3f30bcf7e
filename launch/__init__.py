"""SkyPilot task files and the launch commands that use them."""
