"""Problems that a program can make and judge."""
