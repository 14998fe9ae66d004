"""What only the stand-in has: its environment variables, faults and checks."""
