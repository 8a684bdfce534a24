"""What a command does from one end to the other, one file each."""
