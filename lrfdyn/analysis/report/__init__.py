"""What was measured, as page, tables and figures."""
