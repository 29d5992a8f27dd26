from medusa_kit.cli import main

main()
