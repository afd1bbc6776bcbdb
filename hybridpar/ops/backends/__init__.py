"""Registry of operator backends, and the libraries that provide them."""
