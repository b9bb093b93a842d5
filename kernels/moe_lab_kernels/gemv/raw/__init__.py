"""Raw blocks: the steps of each format as the file has them."""
