"""Long checks that are also scripts: kills, restarts and changed bytes in numbers that a user would not wait for."""
