"""`python -m app` is `pocketreel`."""

from app.cli import main

if __name__ == "__main__":
    main()
