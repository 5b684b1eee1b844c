"""What commands and benchmarks show: tables for people, documents for programs."""
