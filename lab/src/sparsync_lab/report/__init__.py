"""The report of a comparison: its records, the numbers made from them, and tables, pictures and a page that show the numbers."""
