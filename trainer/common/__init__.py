"""What every room uses: errors as values."""
