"""Level 6: what people look at. Every figure once (`figures`), and every page that shows them."""
