"""What every room uses: errors, files, progress and words."""
