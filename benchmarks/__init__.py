"""Side-by-side measurements; each script prints a table and can write JSON."""
