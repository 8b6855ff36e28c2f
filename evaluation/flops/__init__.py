"""What pre-training costs in floating-point operations, counted by formula and measured."""
