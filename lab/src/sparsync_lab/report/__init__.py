"""The report of a comparison: its records, the numbers made from them, and the tables, pictures and page that show the numbers."""
